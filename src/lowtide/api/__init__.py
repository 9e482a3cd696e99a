"""Public functions of Lowtide, one file each."""
