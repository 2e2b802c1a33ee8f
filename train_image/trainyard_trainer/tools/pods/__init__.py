"""Programs that only pods of the platform run: the check of image and storage, progress, and ends."""
