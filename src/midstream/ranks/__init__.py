"""Pipeline stages and tensor-parallel ranks: they fetch, gather and merge each other's values."""
