"""A trained model at work: predict and export."""
