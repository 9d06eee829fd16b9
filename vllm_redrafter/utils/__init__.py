"""What all parts use: errors, names, files, settings."""
