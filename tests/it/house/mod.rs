//! Rules that the source code keeps.

mod interface;
mod layering;
