"""Lightning callbacks: throughput, sample completions, the loss plot and the progress bar."""

from lightning_nd.callbacks.loss_plot import LossPlot
from lightning_nd.callbacks.progress import ProgressBar
from lightning_nd.callbacks.samples import SampleCompletions
from lightning_nd.callbacks.throughput import Throughput

__all__ = ["LossPlot", "ProgressBar", "SampleCompletions", "Throughput"]
