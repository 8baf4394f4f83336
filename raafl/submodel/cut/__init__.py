"""Build small modules: the user's own module with smaller tensors, and with the sizes that its code asks for adjusted."""
