"""Files of random numbers for the tests of programs."""
