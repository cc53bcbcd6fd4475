"""Before anything is bought or downloaded: what a model and its settings take, and give."""
