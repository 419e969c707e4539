"""What verbs share: values of options, output, progress."""
