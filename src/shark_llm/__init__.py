"""shark-llm: compile a Hugging Face Llama into a sharded, verifiable IREE bundle, and serve it."""

__version__ = "0.1.0"
