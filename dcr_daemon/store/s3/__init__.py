"""S3-compatible buckets: one implementation of the port `store.port.Store`, and what it needs of the S3 client."""
