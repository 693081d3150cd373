"""From the steps of choices to the bodies and chunks of one protocol each."""
