"""Training processes for the tests: real models, cut in every way, that publish what they hold."""
