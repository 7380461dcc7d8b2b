"""How each format lays out the tensors of a layer."""
