"""`make doctor`: is this machine, and this checkout, fit to run the pipeline? Looks, and changes nothing. See docs/doctor.md."""
