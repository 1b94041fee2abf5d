"""Tasks that compare mechanisms: long sequences as integer tensors, with trivial floors and slices."""
