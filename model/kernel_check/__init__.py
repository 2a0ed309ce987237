"""The self-check of the kernels on a GPU: what a model launches is compared with torch before the model is served."""
