/** Members of a JSON object that must have a certain form. A refusal names the member and never quotes its value. */

// Core: no I/O, no clock, no randomness (held by tests/layout.test.ts).

import { type JsonObject, member, refuse } from "./json.js";

/** A required string. */
export function text(members: JsonObject, name: string): string {
  return optionalText(members, name) ?? refuse(`${name} is missing`);
}

/** A string, or undefined. */
export function optionalText(members: JsonObject, name: string): string | undefined {
  const value = member(members, name);
  if (value !== undefined && typeof value !== "string") refuse(`${name} is not a string`);
  return value;
}

/** A required integer from 0 up. */
export function integer(members: JsonObject, name: string): number {
  return optionalInteger(members, name) ?? refuse(`${name} is missing`);
}

/** An integer from 0 up, or undefined. */
export function optionalInteger(members: JsonObject, name: string): number | undefined {
  const value = member(members, name);
  if (value === undefined) return undefined;
  if (!Number.isInteger(value) || (value as number) < 0) refuse(`${name} is not an integer from 0 up`);
  return value as number;
}

/** An array of strings, or undefined. */
export function optionalTexts(members: JsonObject, name: string): readonly string[] | undefined {
  const value = member(members, name);
  if (value === undefined) return undefined;
  if (!Array.isArray(value) || !value.every((item) => typeof item === "string")) {
    refuse(`${name} is not an array of strings`);
  }
  return value as readonly string[];
}
