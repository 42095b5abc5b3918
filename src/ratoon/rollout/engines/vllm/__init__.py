"""vLLM in this process, beside the trainer. Nothing here imports it before it is chosen."""
