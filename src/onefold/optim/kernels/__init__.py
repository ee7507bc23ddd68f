"""One pass over memory per update: Triton on CUDA, C on CPUs."""
