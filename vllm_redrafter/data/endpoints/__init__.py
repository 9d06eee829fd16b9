"""Running servers of the target that answer prompts: any number of them, coming and going."""
