"""A draft model beside the served one."""
