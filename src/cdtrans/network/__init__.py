"""The network: any timm model as the backbone, a head, the kernels that run it, and its saved weights."""
