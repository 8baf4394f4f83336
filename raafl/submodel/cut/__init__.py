"""Making a submodel physical: the user's own module with smaller tensors, and the sizes that its code asks for."""
