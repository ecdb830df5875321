"""Lightning callbacks: throughput, samples, plots."""
