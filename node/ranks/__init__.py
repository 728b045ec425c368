"""The processes of a tensor-parallel node: rank 0 leads, the others follow."""
