"""Running the quick half of the tests under load, with threads that are late at random."""
