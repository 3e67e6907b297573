"""The shared test kit: writers of small model files, fakes and gates."""
