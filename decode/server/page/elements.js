// Elements whose text is text: nothing here reads HTML.

/** An element with properties and children; a child that is a string is text. */
export function make(tag, properties = {}, ...children) {
  const { data = {}, ...rest } = properties;
  const element = Object.assign(document.createElement(tag), rest);
  Object.assign(element.dataset, data);
  element.append(...children);
  return element;
}

const SVG = "http://www.w3.org/2000/svg";

/** An element of an SVG drawing with attributes. */
export function shape(tag, attributes) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  return element;
}
