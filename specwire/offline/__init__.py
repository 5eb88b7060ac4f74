"""The offline API: a model with all its services in the background of a Python program, and answers in lists."""

from specwire.offline.llm import LLM
from specwire.offline.metrics import Counter, Gauge, Vector
from specwire.offline.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput

__all__ = ["LLM", "CompletionOutput", "Counter", "Gauge", "Logprob", "RequestMetrics", "RequestOutput", "Vector"]
