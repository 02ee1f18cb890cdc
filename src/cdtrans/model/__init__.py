"""The network: a timm VisionTransformer, three ways of running it at once, and the head they share."""
