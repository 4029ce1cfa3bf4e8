"""Child processes of tests: forked quickly, ended with the test run."""
