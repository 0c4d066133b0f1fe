"""A thin typed client over the generated stubs."""
