"""Images in: folders and lists, decoding, stores of pixels, batches."""
