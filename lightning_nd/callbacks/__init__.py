"""Lightning callbacks: throughput, sample completions, scores, metrics, advice, the start, the loss plot, the bar."""

from lightning_nd.callbacks.advice import PlanAdvice
from lightning_nd.callbacks.banner import StartBanner
from lightning_nd.callbacks.loss_plot import LossPlot
from lightning_nd.callbacks.metrics import MetricsLog
from lightning_nd.callbacks.progress import ProgressBar
from lightning_nd.callbacks.samples import GenerateSamples, SampleCompletions
from lightning_nd.callbacks.scores import ScoreWriter
from lightning_nd.callbacks.throughput import Throughput

__all__ = [
    "GenerateSamples",
    "LossPlot",
    "MetricsLog",
    "PlanAdvice",
    "ProgressBar",
    "SampleCompletions",
    "ScoreWriter",
    "StartBanner",
    "Throughput",
]
