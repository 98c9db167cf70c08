//! Rules that the source code keeps.

mod layering;
