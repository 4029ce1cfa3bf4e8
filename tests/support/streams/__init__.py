"""Both ends of a stream: versions of a small model, publishers, a record writer, a subscriber."""
