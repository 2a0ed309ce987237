"""A scheduled step on the device: batches, CUDA graphs, sampling, warm-up."""
