"""What a device can do, measured part by part: `onefold measure`."""
