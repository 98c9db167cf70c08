//! `MathEval`: arithmetic. The grammar has numbers, `+ - * / %`, signs and parentheses.

use super::{Args, Output, VerbError, failed};

const MAX_LENGTH: usize = 256;
const MAX_DEPTH: usize = 33;
/// The largest whole number that is exact, as are all below it.
const MAX_EXACT: f64 = 9_007_199_254_740_992.0;

pub(super) fn run(verb: &str, args: Args<'_>) -> Option<Output> {
    (verb == "MathEval").then(|| evaluated(args.text(0)))
}

fn evaluated(text: &str) -> Output {
    if text.len() > MAX_LENGTH {
        return failed(format!("an expression has at most {MAX_LENGTH} bytes"));
    }
    let mut parser = Parser { rest: text, depth: 0 };
    let value = parser.sum()?;
    parser.skip_blanks();
    if !parser.rest.is_empty() {
        return wrong();
    }
    if !value.is_finite() {
        return failed("the result is not a number");
    }
    if value.abs() > MAX_EXACT {
        return failed("the result is beyond 2^53, from which on numbers are not exact");
    }
    // Fifteen significant digits are shown, without the error of the binary form.
    let rounded: f64 = format!("{value:.14e}").parse().unwrap_or(value);
    Ok(if rounded == 0.0 { "0".to_owned() } else { rounded.to_string() })
}

fn wrong<T>() -> Result<T, VerbError> {
    failed("not an arithmetic expression of numbers, + - * / % and parentheses")
}

struct Parser<'a> {
    rest: &'a str,
    depth: usize,
}

impl Parser<'_> {
    fn skip_blanks(&mut self) {
        self.rest = self.rest.trim_start_matches(' ');
    }

    fn take(&mut self, one: char) -> bool {
        self.skip_blanks();
        let rest = self.rest.strip_prefix(one);
        self.rest = rest.unwrap_or(self.rest);
        rest.is_some()
    }

    fn sum(&mut self) -> Result<f64, VerbError> {
        let mut value = self.product()?;
        loop {
            if self.take('+') {
                value += self.product()?;
            } else if self.take('-') {
                value -= self.product()?;
            } else {
                return Ok(value);
            }
        }
    }

    fn product(&mut self) -> Result<f64, VerbError> {
        let mut value = self.factor()?;
        loop {
            if self.take('*') {
                value *= self.factor()?;
            } else if self.take('/') {
                value /= self.divisor()?;
            } else if self.take('%') {
                value %= self.divisor()?;
            } else {
                return Ok(value);
            }
        }
    }

    fn divisor(&mut self) -> Result<f64, VerbError> {
        let value = self.factor()?;
        if value == 0.0 { failed("division by zero") } else { Ok(value) }
    }

    fn factor(&mut self) -> Result<f64, VerbError> {
        self.depth = self.depth.saturating_add(1);
        if self.depth > MAX_DEPTH {
            return failed(format!("an expression is nested at most {MAX_DEPTH} deep"));
        }
        let value = if self.take('-') {
            -self.factor()?
        } else if self.take('+') {
            self.factor()?
        } else if self.take('(') {
            let value = self.sum()?;
            if !self.take(')') {
                return wrong();
            }
            value
        } else {
            self.number()?
        };
        self.depth = self.depth.saturating_sub(1);
        Ok(value)
    }

    fn number(&mut self) -> Result<f64, VerbError> {
        self.skip_blanks();
        let end = self.rest.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(self.rest.len());
        let (number, rest) = self.rest.split_at(end);
        self.rest = rest;
        number.parse().or_else(|_| wrong())
    }
}
