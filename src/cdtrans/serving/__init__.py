"""Use a trained model: predict and export."""
