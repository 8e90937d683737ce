"""What would be published, as users install it: ``make package`` builds it and runs these tests."""
