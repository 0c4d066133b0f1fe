"""prefixcache: an LLM inference server that never computes the same prompt prefix twice."""

__version__ = "0.1.0"
