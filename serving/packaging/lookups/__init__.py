"""The operators that look stored rows up, each as modules that can be traced."""
