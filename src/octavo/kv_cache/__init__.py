"""The paged KV cache: block pool, block tables, sharing, prefix index."""
