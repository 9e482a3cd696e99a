"""Render records for people. Nothing here measures or decides."""
