"""Stage 1 fits the source, stage 2 adapts to the target."""
