"""Drawing tokens on the GPU, in two launches that no host has to wait for."""
