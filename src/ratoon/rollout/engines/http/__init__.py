"""Rollout engines that are servers: vLLM and SGLang over HTTP."""
