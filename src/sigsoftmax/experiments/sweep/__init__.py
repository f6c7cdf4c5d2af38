"""Many runs with changed settings, on this machine or on Ray."""
