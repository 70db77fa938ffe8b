"""Pure maths: tensors in, tensors out."""
