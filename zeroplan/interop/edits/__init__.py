"""Changes of a user's own files: each keeps every character but those of the values that change."""
