"""The network: any timm model as the backbone, a head, and cross-attention for vision transformers."""
