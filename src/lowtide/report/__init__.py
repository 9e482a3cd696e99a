"""Records, made readable. Nothing here measures or decides."""
