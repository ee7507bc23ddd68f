"""Update kernels that read and write each vector once: Triton on CUDA, C on CPUs."""
